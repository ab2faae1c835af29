/* Memory for hardware to receive into: zeroed, and where every device that we know takes it. */
#pragma once

#include <stddef.h>

/* Begins at a multiple of 16 KiB, Apple's page, and has no boundary of 4 GiB inside: Apple's provider takes such a
 * region and corrupts what is received there. Hence at most 4 GiB. NULL, with errno set, if there is no such memory.
 * A child of a fork does not have it. */
void* pages_alloc(size_t bytes);
void pages_free(void* memory, size_t bytes);

/* A child of a fork does not have the pages. 0, or -1 with errno set. */
int pages_keep_from_children(void* memory, size_t bytes);
