/*
 * Protection domains of a device that leaks them: a process that is killed leaves its own in use until the machine
 * restarts, as on Thunderbolt.
 *
 * A domain in use is an empty file in XDG_RUNTIME_DIR, or /tmp: mlxdist-UID-domain-DEVICE-HOST-NUMBER. What killed
 * processes have left is removed by rm ${XDG_RUNTIME_DIR:-/tmp}/mlxdist-*-domain-*, which plays the restart.
 */
#define _GNU_SOURCE 1
#include "domains.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PATH_BYTES 1024

static void path_of(const struct soft_context *context, uint32_t domain, char path[PATH_BYTES]) {
  const char *directory = getenv("XDG_RUNTIME_DIR");
  snprintf(path, PATH_BYTES, "%s/mlxdist-%u-domain-%s-%u-%u", directory && *directory ? directory : "/tmp",
           (unsigned)getuid(), context->verbs.device->name, context->host, domain);
}

int soft_domain_take(const struct soft_context *context, uint32_t *domain) {
  char path[PATH_BYTES];
  for (*domain = 0; *domain < context->profile->max_pd; ++*domain) {
    path_of(context, *domain, path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd >= 0) return close(fd) ? errno : 0;
    if (errno != EEXIST) return errno;
  }
  return ENOMEM;
}

void soft_domain_return(const struct soft_context *context, uint32_t domain) {
  char path[PATH_BYTES];
  path_of(context, domain, path);
  unlink(path);
}
