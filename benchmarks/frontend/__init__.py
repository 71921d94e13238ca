"""The audio front end against other ways of turning a file into 16 kHz mono."""
