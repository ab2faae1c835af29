/* See sockets.h. Contexts of several threads share the list of descriptors. */
#define _GNU_SOURCE 1
#define _DARWIN_C_SOURCE 1
#include "sockets.h"

#include "fork_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#define BACKLOG 128

/* A connection over which nothing gets through for so long is given up. The system would repeat ever more slowly, and
 * still wait minutes after a cable is back. */
#define SILENCE_SECONDS 5

static int *descriptors;
static size_t descriptor_count, descriptor_room;

static void forget_parent(void) {
  while (descriptor_count) close(descriptors[--descriptor_count]);
}

FORK_LOCK(forget_parent)

static bool make_room(void) {
  if (descriptor_count < descriptor_room) return true;
  size_t room = descriptor_room ? 2 * descriptor_room : 64;
  int *list = realloc(descriptors, room * sizeof *list);
  if (!list) return false;
  descriptors = list;
  descriptor_room = room;
  return true;
}

static int prepare(int fd) {
  int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) || fcntl(fd, F_SETFD, FD_CLOEXEC)) return -1;
#ifdef SO_NOSIGPIPE
  int on = 1;
  if (setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on)) return -1;
#endif
  return 0;
}

static int give_up(int fd) {
  int error = errno;
  socket_close(fd);
  errno = error;
  return -1;
}

/* A new socket, or the next that has connected to `listener`. Under the lock, so that no child keeps one that is not in
 * the list yet. */
static int take(int listener) {
  lock_list();
  int fd = -1;
  if (!make_room())
    errno = ENOMEM;
  else
    fd = listener < 0 ? socket(AF_INET, SOCK_STREAM, 0) : accept(listener, NULL, NULL);
  if (fd >= 0) descriptors[descriptor_count++] = fd;
  unlock_list();
  return fd >= 0 && prepare(fd) ? give_up(fd) : fd;
}

void socket_close(int fd) {
  if (fd < 0) return;
  lock_list();
  size_t i = 0;
  while (i < descriptor_count && descriptors[i] != fd) i++;
  if (i < descriptor_count) {
    descriptors[i] = descriptors[--descriptor_count];
    close(fd);
  }
  unlock_list();
}

int socket_error(int fd) {
  int error = 0;
  socklen_t length = sizeof error;
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) ? errno : error;
}

int socket_listen(in_port_t *port) {
  int fd = take(-1);
  if (fd < 0) return -1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
  socklen_t length = sizeof address;
  if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, BACKLOG) ||
      getsockname(fd, (struct sockaddr *)&address, &length))
    return give_up(fd);
  *port = address.sin_port;
  return fd;
}

int socket_accept(int listener) { return take(listener); }

/* Messages leave at once, and an end that is gone is noticed. */
static int set_options(int fd) {
  int on = 1;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on)) return -1;
#ifdef __APPLE__
  int seconds = SILENCE_SECONDS;
  return setsockopt(fd, IPPROTO_TCP, TCP_RXT_CONNDROPTIME, &seconds, sizeof seconds);
#else
  unsigned milliseconds = SILENCE_SECONDS * 1000;
  /* Many queue pairs lead to different peers from one local port; without this each would take a port of its own. */
  if (setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on)) return -1;
  return setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
#endif
}

int socket_connect(const struct sockaddr_in *from, const struct sockaddr_in *to) {
  int fd = take(-1);
  if (fd < 0) return -1;
  if (set_options(fd) || bind(fd, (const struct sockaddr *)from, sizeof *from)) return give_up(fd);
  if (connect(fd, (const struct sockaddr *)to, sizeof *to) && errno != EINPROGRESS) return give_up(fd);
  return fd;
}
