"""How commands and events cross between the API process and a replica: the wire and its channels."""
