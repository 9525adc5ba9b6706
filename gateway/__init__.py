"""The OpenAI-compatible front: validates, routes, follows each request to its end."""
