"""What a step does element by element, before and after it orthogonalizes."""
