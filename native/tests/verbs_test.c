/* The choice of a provider, and what goes wrong with verbs in words. */
#include "../providers/providers.h"
#include "../verbs/explain.h"
#include "../verbs/wc_status.h"
#include "check.h"

#include <errno.h>

static const struct verbs *soft(const char *profile) {
  char why[256];
  return verbs_provider("soft", profile, why, sizeof why);
}

static void test_profiles(void) {
  CHECK(soft("ideal") == verbs_soft());
  CHECK(strcmp(soft("ideal")->name, "soft") == 0);
  CHECK(strcmp(soft("apple-tb5")->name, "soft/apple-tb5") == 0);
  CHECK(strcmp(soft("apple-odd")->name, "soft/apple-odd") == 0);
  CHECK(strcmp(soft("rxe")->name, "soft/rxe") == 0);
  CHECK(!soft("") && !soft("apple") && !soft("IDEAL"));
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

static const char *explain(const char *verb, int error) {
  static char text[VERBS_EXPLANATION_BYTES];
  verbs_explain(verb, error, text, sizeof text);
  return text;
}

static void check_advice(const char *verb, int error, const char *advice) {
  const char *text = explain(verb, error);
  CHECK(strstr(text, advice), "%s, error %d: %s", verb, error, text);
}

static void test_explanations(void) {
  check_advice("create_qp", EBUSY, "all queue pairs of the device are in use, by this process or others");
  check_advice("create_qp", ENOMEM, "all queue pairs of the device are in use, by this process or others");
  check_advice("create_qp", EOPNOTSUPP, "MLXDIST_QP_TYPE");
  check_advice("modify_qp to RTR", EINVAL, verbs_port_remedy());
  check_advice("modify_qp to RTR", ETIMEDOUT, "cannot be reached");
  check_advice("modify_qp to RTR", ENODATA, "idle for too long");
  check_advice("alloc_pd", ENOMEM, "no protection domain is left, or the port is down");
  check_advice("alloc_pd", ENOMEM, "`ioclasscount AppleThunderboltRDMAProtectionDomain`");
  check_advice("alloc_pd", 0, "the provider gives no reason: no protection domain is left, or the port is down");
  check_advice("reg_mr", ENOMEM, "ulimit -l");
  check_advice("open_device", EACCES, "/dev/infiniband");
  check_advice("connect", EHOSTUNREACH, strerror(EHOSTUNREACH));
  check_advice("poll_cq", -EIO, "the device is gone");
  /* What is known of one verb is not said of another. */
  CHECK(strcmp(explain("destroy_qp", EBUSY), strerror(EBUSY)) == 0);
  CHECK(strcmp(explain("modify_qp to RTS", EINVAL), strerror(EINVAL)) == 0);
  CHECK(strcmp(explain("poll_cq", -1), "the provider gives no reason") == 0);
}

/* Whatever a provider returns: the system's own words first, one line, and it fits. */
static void test_every_explanation(void) {
  const char *verbs[] = {"open_device",          "query_port",       "alloc_pd",  "reg_mr",    "create_cq", "create_qp",
                         "modify_qp to INIT",    "modify_qp to RTR", "post_send", "post_recv", "poll_cq",   "connect",
                         "a verb of another day"};
  for (size_t verb = 0; verb < sizeof verbs / sizeof *verbs; verb++) {
    for (int error = 1; error < 300; error++) {
      const char *text = explain(verbs[verb], error), *name = strerror(error);
      size_t length = strlen(text);
      CHECK(strncmp(text, name, strlen(name)) == 0, "%s", text);
      CHECK(length + 1 < VERBS_EXPLANATION_BYTES && !strchr(text, '\n') && text[length - 1] != '.', "%s", text);
    }
  }
  char part[8];
  verbs_explain("reg_mr", ENOMEM, part, sizeof part);
  CHECK(strncmp(part, strerror(ENOMEM), 7) == 0 && strlen(part) == 7);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Profiles", test_profiles},
      {"WcStatusNames", test_wc_status_names},
      {"Explanations", test_explanations},
      {"EveryExplanation", test_every_explanation},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
