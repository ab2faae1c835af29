/* The system's verbs library through the verbs table. tests/native/test_native_verbs.py puts a stand-in for libibverbs
 * in the place of the system's, and says by EXPECTED, for some tests, what it is. */
#include "../providers/providers.h"
#include "../verbs/apple.h"
#include "../verbs/library.h"
#include "../verbs/pages.h"
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>

static const char *expected(void) {
  const char *text = getenv("EXPECTED");
  CHECK(text, "EXPECTED is not set");
  return text;
}

static const struct verbs *open_library(void) {
  char why[1024] = "";
  const struct verbs *verbs = verbs_library("ibverbs", why, sizeof why);
  CHECK(verbs, "%s", why);
  CHECK(strcmp(verbs->name, "ibverbs") == 0);
  return verbs;
}

static struct ibv_context *open_context(const struct verbs *verbs) {
  int devices = -1;
  struct ibv_device **list = verbs->get_device_list(&devices);
  CHECK(list && list[0] && !list[1]);
  CHECK_EQUAL(devices, 1);
  CHECK(strcmp(verbs->get_device_name(list[0]), "stand0") == 0);
  struct ibv_context *context = verbs->open_device(list[0]);
  CHECK(context && context->device == list[0]);
  verbs->free_device_list(list);
  return context;
}

/* Asked a second time it says the same. A text that does not fit is cut. */
static void test_rejected(void) {
  for (int i = 0; i < 2; i++) {
    char why[1024] = "", part[8] = "";
    CHECK(!verbs_provider("ibverbs", "ideal", why, sizeof why));
    CHECK(strcmp(why, expected()) == 0, "%s", why);
    CHECK(!verbs_provider("ibverbs", "ideal", part, sizeof part));
    CHECK(strncmp(part, why, 7) == 0 && strlen(part) == 7, "%s", part);
  }
}

static void test_other_names(void) {
  char why[256] = "";
#ifdef __APPLE__
  CHECK(!verbs_library("ibverbs", why, sizeof why));
  CHECK(strcmp(why, "provider ibverbs is Linux's; here it is librdma") == 0, "%s", why);
#else
  CHECK(!verbs_library("librdma", why, sizeof why));
  CHECK(strcmp(why, "provider librdma is macOS's; here it is ibverbs") == 0, "%s", why);
#endif
  const char *wrong[] = {"", "IBVERBS", "ibverbs ", "libibverbs.so.1"};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    CHECK(!verbs_library(wrong[i], why, sizeof why));
    CHECK(strstr(why, "there are soft, ibverbs and librdma (MLXDIST_PROVIDER)"), "%s", why);
  }
}

static void test_devices(void) {
  const struct verbs *verbs = open_library();
  CHECK(verbs->close_device(open_context(verbs)) == 0);
  CHECK(verbs->reliable && !verbs->registers_freely);
  CHECK(!verbs->read_counters && !verbs->inject && !verbs->set_virtual_host && !verbs->set_key);
}

static void test_no_devices(void) {
  const struct verbs *verbs = open_library();
  for (int i = 0; i < 2; i++) {
    int devices = -1;
    struct ibv_device **list = verbs->get_device_list(&devices);
    CHECK(list && !list[0]);
    CHECK_EQUAL(devices, 0);
    verbs->free_device_list(list);
  }
}

static void test_listing_fails(void) {
  int devices = -1;
  CHECK(!open_library()->get_device_list(&devices));
  CHECK_EQUAL(errno, atoi(expected()));
}

static void *open_in_thread(void *why) { return (void *)verbs_library("ibverbs", why, 64); }

static void test_many_threads(void) {
  enum { THREADS = 16 };
  pthread_t threads[THREADS];
  char why[THREADS][64];
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, open_in_thread, why[i]) == 0);
  for (int i = 0; i < THREADS; i++) {
    void *verbs;
    CHECK(pthread_join(threads[i], &verbs) == 0);
    CHECK(verbs == open_library());
  }
}

/* EXPECTED: port_cap_flags2, which only the newer of the two functions fills. The rest is there either way, and
 * nothing of what the caller's memory held before. */
static void test_query_port(void) {
  const struct verbs *verbs = open_library();
  struct ibv_port_attr attr;
  memset(&attr, 0xaa, sizeof attr);
  CHECK_EQUAL(verbs->query_port(open_context(verbs), 1, &attr), 0);
  CHECK_EQUAL(attr.lid, 1);
  CHECK_EQUAL(attr.link_layer, IBV_LINK_LAYER_ETHERNET);
  CHECK_EQUAL(attr.max_msg_sz, 0);
  CHECK_EQUAL(attr.port_cap_flags2, strtol(expected(), NULL, 0));
}

static void test_query_gid(void) {
  const struct verbs *verbs = open_library();
  struct ibv_context *context = open_context(verbs);
  union ibv_gid gid;
  CHECK_EQUAL(verbs->query_gid(context, 1, 5, &gid), 0);
  CHECK_EQUAL(gid.raw[15], 5);
  CHECK_EQUAL(verbs->query_gid(context, 1, 8, &gid), EPERM);
  CHECK_EQUAL(verbs->query_gid(context, 1, 9, &gid), EINVAL);
}

static void check_gid_type(uint8_t port, int index, enum verbs_gid_type wanted) {
  const struct verbs *verbs = open_library();
  enum verbs_gid_type type = VERBS_GID_TCP;
  CHECK_EQUAL(verbs->query_gid_type(open_context(verbs), port, index, &type), 0);
  CHECK(type == wanted, "port %d index %d: %d instead of %d", port, index, type, wanted);
}

static void test_gid_types(void) {
  check_gid_type(1, 0, VERBS_GID_IB);
  check_gid_type(1, 1, VERBS_GID_ROCE_V1);
  check_gid_type(1, 2, VERBS_GID_ROCE_V2);
  check_gid_type(1, 3, VERBS_GID_UNKNOWN); /* a number of the future */
  enum verbs_gid_type type;
  const struct verbs *verbs = open_library();
  CHECK_EQUAL(verbs->query_gid_type(open_context(verbs), 1, 4, &type), ENODATA);
}

/* Of the kernel's files that test_native_verbs.py writes; port 2 is InfiniBand. */
static void test_gid_types_of_files(void) {
  check_gid_type(1, 0, VERBS_GID_ROCE_V1);
  check_gid_type(1, 1, VERBS_GID_ROCE_V2);
  check_gid_type(1, 2, VERBS_GID_UNKNOWN); /* a word of the future */
  check_gid_type(2, 0, VERBS_GID_IB);
  check_gid_type(1, 100, VERBS_GID_UNKNOWN); /* no such file: an older kernel */
  enum verbs_gid_type type;
  const struct verbs *verbs = open_library();
  CHECK_EQUAL(verbs->query_gid_type(open_context(verbs), 1, 3, &type), ENODATA); /* an empty file */
}

/* The library gives nothing and no reason: an errno of before is none. */
static void test_no_reason(void) {
  const struct verbs *verbs = open_library();
  struct ibv_context *context = open_context(verbs);
  struct ibv_pd pd = {.context = context};
  struct ibv_qp_init_attr init = {0};
  errno = ENOENT;
  CHECK(!verbs->alloc_pd(context));
  CHECK_EQUAL(errno, 0);
  errno = ENOENT;
  CHECK(!verbs->reg_mr(&pd, &init, sizeof init, 0));
  CHECK_EQUAL(errno, 0);
  errno = ENOENT;
  CHECK(!verbs->create_cq(context, 1, NULL, NULL, 0));
  CHECK_EQUAL(errno, 0);
  errno = ENOENT;
  CHECK(!verbs->create_qp(&pd, &init));
  CHECK_EQUAL(errno, 0);
}

#define KIB ((size_t)1 << 10)
#define GIB ((size_t)1 << 30)

static void check_pages(const char *memory, size_t bytes) {
  CHECK(memory, "%zu bytes: %s", bytes, strerror(errno));
  uintptr_t begin = (uintptr_t)memory, end = begin + (bytes ? bytes : 1) - 1;
  CHECK_EQUAL(begin % (16 * KIB), 0);
  CHECK(begin / (4 * GIB) == end / (4 * GIB), "%zu bytes at %p", bytes, (void *)memory);
}

static void test_pages(void) {
  const size_t sizes[] = {0, 1, 4096, 16 * KIB, 16 * KIB + 1, 1000000, 64 * KIB * KIB};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    char *memory = pages_alloc(sizes[i]);
    check_pages(memory, sizes[i]);
    for (size_t byte = 0; byte < sizes[i]; byte++) CHECK(!memory[byte], "byte %zu of %zu", byte, sizes[i]);
    if (sizes[i]) memory[0] = memory[sizes[i] - 1] = 1;
    pages_free(memory, sizes[i]);
  }
  pages_free(NULL, 4096);
}

/* Without the care that is taken, six in a row of 3 GiB would have a boundary inside more than once. Nothing of them is
 * touched but their ends. */
static void test_large_pages(void) {
  enum { COUNT = 6 };
  char *memory[COUNT];
  for (int i = 0; i < COUNT; i++) {
    memory[i] = pages_alloc(3 * GIB);
    check_pages(memory[i], 3 * GIB);
    memory[i][0] = memory[i][3 * GIB - 1] = 1;
  }
  for (int i = 0; i < COUNT; i++) pages_free(memory[i], 3 * GIB);
  char *whole = pages_alloc(4 * GIB);
  check_pages(whole, 4 * GIB);
  pages_free(whole, 4 * GIB);
  errno = 0;
  CHECK(!pages_alloc(4 * GIB + 1));
  CHECK_EQUAL(errno, ENOMEM);
  CHECK(!pages_alloc(SIZE_MAX));
}

/* What was given back, and what was reserved around it, is unmapped. */
static void test_freed_pages(void) {
  char *memory = pages_alloc(64 * KIB);
  CHECK(msync(memory, 64 * KIB, MS_ASYNC) == 0);
  pages_free(memory, 64 * KIB);
  for (size_t page = 0; page < 4; page++) {
    CHECK(msync(memory + page * 16 * KIB, 16 * KIB, MS_ASYNC) != 0);
    CHECK_EQUAL(errno, ENOMEM);
  }
}

static void test_pages_and_fork(void) {
  char *memory = pages_alloc(16 * KIB);
  memory[0] = 1;
  pid_t child = fork();
  if (child == 0) _exit(msync(memory, 16 * KIB, MS_ASYNC) != 0 && errno == ENOMEM ? 0 : 1);
  CHECK_EQUAL(check_wait(child), 0);
  CHECK_EQUAL(memory[0], 1);
  pages_free(memory, 16 * KIB);
}

static uint32_t largest_message(enum ibv_transport_type transport, uint8_t link_layer, const char *release) {
  const struct ibv_device device = {.transport_type = transport};
  struct ibv_port_attr attr = {.link_layer = link_layer, .max_msg_sz = 1 << 30};
  apple_correct_port(&device, release, &attr);
  CHECK_EQUAL(attr.link_layer == IBV_LINK_LAYER_THUNDERBOLT, attr.max_msg_sz < 1 << 30);
  return attr.max_msg_sz;
}

static void test_apple_messages(void) {
  const char *frames[] = {"25.2.0", "25.2",   "25.1.0", "25",   "24.6.0", "16.3",
                          "26.0.0", "27.0.0", "27",     "28.1", "",       "nonsense"};
  for (size_t i = 0; i < sizeof frames / sizeof *frames; i++)
    CHECK(largest_message(IBV_TRANSPORT_THUNDERBOLT, IBV_LINK_LAYER_UNSPECIFIED, frames[i]) == 4096, "Darwin %s",
          frames[i]);
  const char *larger[] = {"25.3.0", "25.3", "25.10.0"};
  for (size_t i = 0; i < sizeof larger / sizeof *larger; i++)
    CHECK(largest_message(IBV_TRANSPORT_UNKNOWN, IBV_LINK_LAYER_THUNDERBOLT, larger[i]) == 16773120, "Darwin %s",
          larger[i]);
}

/* A card of another maker, and its driver, under macOS. */
static void test_other_devices_of_macs(void) {
  CHECK_EQUAL(largest_message(IBV_TRANSPORT_UNKNOWN, IBV_LINK_LAYER_ETHERNET, "25.2.0"), 1 << 30);
  CHECK_EQUAL(largest_message(IBV_TRANSPORT_UNSPECIFIED, IBV_LINK_LAYER_UNSPECIFIED, ""), 1 << 30);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Rejected", test_rejected},
      {"OtherNames", test_other_names},
      {"Devices", test_devices},
      {"NoDevices", test_no_devices},
      {"ListingFails", test_listing_fails},
      {"ManyThreads", test_many_threads},
      {"QueryPort", test_query_port},
      {"QueryGid", test_query_gid},
      {"GidTypes", test_gid_types},
      {"GidTypesOfFiles", test_gid_types_of_files},
      {"NoReason", test_no_reason},
      {"Pages", test_pages},
      {"LargePages", test_large_pages},
      {"FreedPages", test_freed_pages},
      {"PagesAndFork", test_pages_and_fork},
      {"AppleMessages", test_apple_messages},
      {"OtherDevicesOfMacs", test_other_devices_of_macs},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
