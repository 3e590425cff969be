"""The bodies of the HTTP API, as OpenAI's clients write and read them."""
