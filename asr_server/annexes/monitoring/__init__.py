"""What an operator sees of the server: metrics, the last minutes, traces."""
