"""What an operator sees: events, logs and health."""
