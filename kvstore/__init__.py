"""The store: nodes that keep KV blocks by name, and the client that finds them.

    messages, spans, results   what the two say to each other
    placement, router, links   which node has a block, which to ask first, the connection to it
    transfers, checksum        what bytes are moved and checked with
    client/                    the store as workers and other programs see it
    index/                     what a node decides: pure, no I/O
    eviction/                  which block goes first: pure, judged on traces
    flash/                     a node's second tier: a log on a local disk
    objects/                   a third, shared one: objects in an S3-compatible bucket
    node/                      the process around them: calls, bytes, copies on other nodes

Imports go one way: node -> client, objects -> flash -> what all share; index -> eviction.
"""
