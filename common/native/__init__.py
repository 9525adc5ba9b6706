"""Compiled code: what is read byte by byte or number by number, without the interpreter."""
