/*
 * TCP sockets of this process: they never block, raise no SIGPIPE, and no other program inherits them. A child that is
 * forked closes them: a connection has to end with the process that it belongs to.
 */
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/types.h>

#ifdef MSG_NOSIGNAL
#define SOCKET_SEND_FLAGS MSG_NOSIGNAL
#else
#define SOCKET_SEND_FLAGS 0 /* macOS: SO_NOSIGPIPE */
#endif

/* They return a descriptor, or -1 with errno set. Two queue pairs of one process may connect to each other. */

/* Listens on all addresses, at a port that the system chooses. */
int socket_listen(in_port_t* port /* in network order */);
int socket_accept(int listener);
/* Begins to connect: the socket is writable when that is done, and socket_error says how. */
int socket_connect(const struct sockaddr_in* from, const struct sockaddr_in* to);

int socket_error(int fd); /* errno value that is pending */
void socket_close(int fd);
