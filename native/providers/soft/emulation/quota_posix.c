/* Locks on macOS: a locked file in the user's directory for temporary files, which is removed with the lock. Of a
 * process that was killed an empty file is left, unlocked; the next process in that slot removes it. */
#define _GNU_SOURCE 1
#include "quota_system.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 1280

static int path_of(const char *name, char path[PATH_BYTES]) {
  char directory[1024] = "/tmp/";
#ifdef _CS_DARWIN_USER_TEMP_DIR
  size_t length = confstr(_CS_DARWIN_USER_TEMP_DIR, directory, sizeof directory);
  if (length == 0 || length > sizeof directory) return ENAMETOOLONG;
#endif
  snprintf(path, PATH_BYTES, "%s%s.lock", directory, name);
  return 0;
}

/* Whether the locked file still has its name: the last one to hold it removes it. */
static bool is_there(const char *path, int fd) {
  struct stat named, locked;
  return fstat(fd, &locked) == 0 && lstat(path, &named) == 0 && named.st_ino == locked.st_ino &&
         named.st_dev == locked.st_dev;
}

int quota_lock(const char *name) {
  char path[PATH_BYTES];
  int error = path_of(name, path);
  while (!error) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return -1;
    error = flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    if (!error && is_there(path, fd)) return fd;
    close(fd);
  }
  errno = error == EWOULDBLOCK ? EBUSY : error;
  return -1;
}

void quota_unlock(const char *name, int fd) {
  char path[PATH_BYTES];
  if (path_of(name, path) == 0) unlink(path); /* before another process can have the lock */
  close(fd);
}
