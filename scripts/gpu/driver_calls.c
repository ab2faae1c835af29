/* Counts the calls of CUDA's driver by name, as CUPTI's callback; common.py loads it. CUPTI's header is not needed: the
 * structure begins with enter (0) or exit, and the name. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define MAX_NAMES 512

static _Atomic(const char *) names[MAX_NAMES];
static atomic_long counts[MAX_NAMES];

struct data {
  int site;
  const char *name;
};

void count_call(void *user, int domain, uint32_t number, const struct data *data) {
  (void)user, (void)domain;
  if (data->site != 0 || number >= MAX_NAMES) return;
  atomic_store(&names[number], data->name);
  atomic_fetch_add(&counts[number], 1);
}

const char *name_of(int number) { return atomic_load(&names[number]); }

long take_count(int number) { return atomic_exchange(&counts[number], 0); }
