"""A third tier that a cluster's store nodes share: objects in an S3-compatible bucket.

    names      what an object is called: its name says which blocks it holds
    contents   what its bytes mean: flash's records, at equal distances
    shelf      which objects there are, in memory; which go first
    store      the seam: put, read, delete, list          s3   a bucket, by obstore

An object holds up to a segment (32) of one chain's blocks: a request costs the same for one block
as for all, and a segment's are asked for together. A range of it is read when fewer are. Nothing is
ever changed in place. Its name follows from its content, so nodes need not agree on anything, and
says what is in it, so that a node that starts learns all by listing alone. The node's side is
`node/tiers/bucket_tier.py`, with what goes there in `node/tiers/uploads.py` and what leaves in
`node/tiers/bucket.py`.
"""
