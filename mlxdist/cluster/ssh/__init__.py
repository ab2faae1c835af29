"""Other hosts: how they are reached (ssh.py), and calls of functions there over one connection each.

protocol.py      frames, and what they mean
connection.py    the client's end; rpc_client.py plain calls to several hosts
rpc_server.py    the server's end; its table of functions comes from the command `mlxdist rpc-server`
"""
