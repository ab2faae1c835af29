/* The choice of a provider, and completion statuses in words. */
#include "../verbs/verbs.h"
#include "../verbs/wc_status.h"
#include "check.h"

#include <pthread.h>

static void *choose(void *unused) {
  (void)unused;
  return (void *)(uintptr_t)verbs_choose();
}

/* Threads that ask at once get the same answer, the one that EXPECTED_REASON has. */
static void test_choose(void) {
  pthread_t threads[8];
  for (int i = 0; i < 8; i++) CHECK_EQUAL(pthread_create(&threads[i], NULL, choose, NULL), 0);
  for (int i = 0; i < 8; i++) {
    void *chosen;
    CHECK_EQUAL(pthread_join(threads[i], &chosen), 0);
    CHECK(chosen == verbs_choose());
  }
  CHECK(strcmp(verbs_choose()->name, "soft") == 0);
  CHECK(verbs_choose()->open_device == verbs_soft()->open_device);
  const char *expected = getenv("EXPECTED_REASON");
  CHECK(expected, "EXPECTED_REASON is not set");
  CHECK(strcmp(verbs_choose()->reason, expected) == 0, "the reason is: %s", verbs_choose()->reason);
}

static void test_wc_status_names(void) {
  for (int i = IBV_WC_SUCCESS; i <= IBV_WC_TM_RNDV_INCOMPLETE; i++) {
    const char *name = verbs_wc_status_name((enum ibv_wc_status)i);
    CHECK(strstr(name, ": ") && !strstr(name, "unknown"), "status %d: %s", i, name);
    for (int j = 0; j < i; j++) CHECK(strcmp(name, verbs_wc_status_name((enum ibv_wc_status)j)) != 0);
  }
  CHECK(strncmp(verbs_wc_status_name(IBV_WC_LOC_PROT_ERR), "LOC_PROT_ERR: ", 14) == 0);
  CHECK(strstr(verbs_wc_status_name((enum ibv_wc_status)99), "unknown"));
}

int main(int argc, char **argv) {
  static const struct check tests[] = {{"Choose", test_choose}, {"WcStatusNames", test_wc_status_names}};
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
