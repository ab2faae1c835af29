/* The choice of a provider, and completion statuses in words. */
#include "../verbs/verbs.h"
#include "../verbs/wc_status.h"
#include "check.h"

#include <pthread.h>

static void *ask(void *unused) {
  (void)unused;
  return (void *)(uintptr_t)verbs_reason();
}

/* Threads that ask at once get the same answer, the one that EXPECTED_REASON has. */
static void test_reason(void) {
  const char *expected = getenv("EXPECTED_REASON");
  CHECK(expected, "EXPECTED_REASON is not set");
  pthread_t threads[8];
  for (int i = 0; i < 8; i++) CHECK_EQUAL(pthread_create(&threads[i], NULL, ask, NULL), 0);
  for (int i = 0; i < 8; i++) {
    void *told;
    CHECK_EQUAL(pthread_join(threads[i], &told), 0);
    CHECK(strcmp(told, expected) == 0, "the reason is: %s", (char *)told);
  }
}

static void test_choose(void) {
  CHECK(verbs_choose("ideal") == verbs_soft());
  CHECK(strcmp(verbs_choose("ideal")->name, "soft") == 0);
  CHECK(strcmp(verbs_choose("apple-tb5")->name, "soft/apple-tb5") == 0);
  CHECK(strcmp(verbs_choose("rxe")->name, "soft/rxe") == 0);
  CHECK(!verbs_choose("") && !verbs_choose("apple") && !verbs_choose("IDEAL"));
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
  static const struct check tests[] = {
      {"Reason", test_reason}, {"Choose", test_choose}, {"WcStatusNames", test_wc_status_names}};
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
