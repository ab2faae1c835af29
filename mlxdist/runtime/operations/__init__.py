"""The operations of a group: collectives and messages, lazy and eager."""
