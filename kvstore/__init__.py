"""The store: nodes that keep KV blocks by name, and the client that finds them."""
