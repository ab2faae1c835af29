/* Which slots of shared devices this process holds. */
#define _POSIX_C_SOURCE 200809L
#include "quota.h"

#include "../fork_lock.h"
#include "quota_system.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct quota_slot {
  char name[QUOTA_NAME_BYTES];
  int fd; /* -1 in a child that was forked */
  struct quota_slot *next;
};

static struct quota_slot *slots;

/* The child must not keep a slot when the parent has ended. */
static void forget_parent(void) {
  for (struct quota_slot *slot = slots; slot; slot = slot->next) {
    close(slot->fd);
    slot->fd = -1;
  }
}

FORK_LOCK(forget_parent)

static int lock_any(struct quota_slot *slot, const char *device, uint32_t host, uint32_t limit) {
  slot->fd = -1;
  errno = EBUSY;
  for (uint32_t n = 0; n < limit && slot->fd < 0 && errno == EBUSY; n++) {
    snprintf(slot->name, sizeof slot->name, "mlxdist-%u-%s-%u-%u", (unsigned)getuid(), device, host, n);
    slot->fd = quota_lock(slot->name);
  }
  return slot->fd < 0 ? errno : 0;
}

struct quota_slot *quota_take(const char *device, uint32_t host, uint32_t limit) {
  struct quota_slot *slot = calloc(1, sizeof *slot);
  if (!slot) return NULL;
  lock_list();
  int error = lock_any(slot, device, host, limit);
  if (!error) {
    slot->next = slots;
    slots = slot;
  }
  unlock_list();
  if (!error) return slot;
  free(slot);
  errno = error;
  return NULL;
}

void quota_return(struct quota_slot *slot) {
  if (!slot) return;
  lock_list();
  struct quota_slot **link = &slots;
  while (*link != slot) link = &(*link)->next;
  *link = slot->next;
  if (slot->fd >= 0) quota_unlock(slot->name, slot->fd);
  unlock_list();
  free(slot);
}
