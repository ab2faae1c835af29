/* What differs between systems: quota_abstract.c (Linux) and quota_posix.c (macOS). */
#pragma once

#define QUOTA_NAME_BYTES 64

/* Locks `name` and returns a descriptor that holds the lock; -1 with EBUSY in errno if another process does. */
int quota_lock(const char* name);
void quota_unlock(const char* name, int fd);
