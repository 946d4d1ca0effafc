"""Looking at Python sources, classes and objects without running any of their code."""
