"""The group of ranks, its subgroups and handles, and the world that all groups of a process share."""
