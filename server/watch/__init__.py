"""What a running daemon tells about itself over HTTP, and how a terminal shows it."""
