"""Framed request/response and streams over TCP, with deadlines, cancellation and a bounded window.

Frames, and errors on the wire, are in `frames.py`; who is at each end, in `hello.py`.

    caller   CALL(id, request) ───────────────────────────────> handler
             ITEM(id, message), of a request that one follows   ───>
             REPLY(id, message)  or  ITEM(id, message)* END(id) <───
             ERROR(id, …)                                       <───
             CANCEL(id) ──> the handler's scope is cancelled, nothing is answered

A lost connection cancels every handler that it started and fails every call that waits on it with
Unavailable. It refuses to retry: callers know what another attempt costs.
"""
