"""A store node below its memory: flash and the bucket, what goes down and what comes up."""
