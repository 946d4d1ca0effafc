"""Learning-rate and weight-decay schedules: styles as pure functions, and the scheduler that applies them."""
