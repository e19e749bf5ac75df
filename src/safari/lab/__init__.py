"""The lab example: a Flower app with models in datagrams on the embedded digits, and the processes that run it."""
