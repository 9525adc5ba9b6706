"""A store node's second tier: a log of fixed-size segment files on a local disk.

    records   what a byte on the disk means       disk                where the bytes are
    files     how many there are, which goes      folder              made, locked, made again
    table     which key is where, in memory       segment, appender   one file; how it is written
    background  the files before and after that one
    recovery  what a restart finds again          catalog             find, read
    log       append, sync, drop, free

A record says itself what it is: its own checksum, the random id of its file and its place in it, so
that neither what a file held before nor bytes inside a payload pass for one. Newer records win over
older ones of their key. A sealed file ends in an index of its records.
"""
