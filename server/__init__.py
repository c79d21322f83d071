"""What a client sees: HTTP, OpenAI shapes, streaming, the command line."""
