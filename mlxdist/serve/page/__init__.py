"""The page of `mlxdist serve`: a chat, and the cluster, which `mlxdist top --web` shows, too. It has no build step.

    page.html, page.css, icon.svg   what there is before a script runs
    page.js                         the start: the key, and which of the two is shown
    server.js                       requests to the server
    chat.js                         conversations, in the browser's storage
    markdown.js                     an answer as elements, never as markup
    cluster.js                      what /cluster has

The files are served as they are, to clients without a key, too: they hold nothing of the server. Everything else that
the page shows comes by requests, with the key.
"""

from .routes import PAGE_PATHS, page_routes

__all__ = ["PAGE_PATHS", "page_routes"]
