"""Put the core and the annexes together, and run them in the API process."""
