/* Locks on Linux: the name of a socket that is in no directory. Only one socket can have it, and it ends with the last
 * descriptor. */
#define _GNU_SOURCE 1
#include "quota_system.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int quota_lock(const char *name) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  size_t length = strlen(name);
  memcpy(address.sun_path + 1, name, length); /* behind a zero: the name is abstract */
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  if (bind(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)) == 0)
    return fd;
  int error = errno;
  close(fd);
  errno = error == EADDRINUSE ? EBUSY : error;
  return -1;
}

void quota_unlock(const char *name, int fd) {
  (void)name;
  close(fd);
}
