"""Starting and looking after a cluster: the `kvass` program."""
