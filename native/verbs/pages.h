/* Memory for hardware to receive into: zeroed, and where every device that we know takes it. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define PAGES_UNIT (UINT64_C(16) << 10) /* Apple's page */

/* Begins at a multiple of PAGES_UNIT, and has no boundary of 4 GiB inside: Apple's provider takes such a
 * region and corrupts what is received there. Hence at most 4 GiB. NULL, with errno set, if there is no such memory.
 * A child of a fork does not have it. */
void* pages_alloc(size_t bytes);
void pages_free(void* memory, size_t bytes);

/* A child of a fork does not have the pages. 0, or -1 with errno set. */
int pages_keep_from_children(void* memory, size_t bytes);
