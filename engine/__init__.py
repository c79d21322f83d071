"""One request's life: text to tokens, scheduling, the model, sampling, tokens to text."""
