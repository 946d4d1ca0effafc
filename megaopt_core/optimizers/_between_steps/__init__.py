"""What happens to a model between two steps of its optimizer: somebody writes to it, or changes what trains."""
