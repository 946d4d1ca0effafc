"""What is brought into an optimizer after its build: values of the model, settings of groups."""
