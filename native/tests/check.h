/*
 * What every C test needs: CHECK, CHECK_EQUAL and a main that runs each test in a process of its own, so that
 * a crash or a hang is the failure of one test and leaves nothing to the next.
 *
 *   static void test_addition(void) { CHECK_EQUAL(1 + 1, 2); }
 *   int main(int argc, char **argv) {
 *     static const struct check tests[] = {{"Addition", test_addition}};
 *     return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
 *   }
 *
 * Run without arguments for all tests, or with the names of some.
 */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK_SECONDS 120 /* for one test: the sanitizers and two busy cores included */

struct check {
  const char* name;
  void (*run)(void);
};

/* Ends the process: a test cannot go on from a state it did not expect. */
#define CHECK(condition, ...)                                                      \
  do {                                                                             \
    if (!(condition)) {                                                            \
      fprintf(stderr, "%s:%d: CHECK(%s) failed.", __FILE__, __LINE__, #condition); \
      fprintf(stderr, " " __VA_ARGS__);                                            \
      fprintf(stderr, "\n");                                                       \
      _exit(1);                                                                    \
    }                                                                              \
  } while (0)

#define CHECK_EQUAL(value, expected)                                                                        \
  do {                                                                                                      \
    long long check_value = (long long)(value), check_expected = (long long)(expected);                     \
    CHECK(check_value == check_expected, "%s is %lld, expected %lld", #value, check_value, check_expected); \
  } while (0)

static inline int check_wait(pid_t pid) {
  int status = 0;
  if (waitpid(pid, &status, 0) != pid) return -1;
  return status;
}

static inline int check_run(const struct check* test) {
  fflush(NULL);
  pid_t pid = fork();
  if (pid == 0) {
    alarm(CHECK_SECONDS);
    test->run();
    exit(0); /* runs the leak checker of the sanitizers, which _exit would not */
  }
  int status = pid < 0 ? -1 : check_wait(pid);
  printf("%s %s", status == 0 ? "ok    " : "FAILED", test->name);
  if (status != 0 && WIFSIGNALED(status)) printf(" (signal %d)", WTERMSIG(status));
  printf("\n");
  return status != 0;
}

static inline int check_main(int argc, char** argv, const struct check* tests, size_t count) {
  int failed = 0, run = 0;
  for (size_t i = 0; i < count; i++) {
    int wanted = argc < 2;
    for (int a = 1; a < argc; a++) wanted |= strcmp(argv[a], tests[i].name) == 0;
    if (!wanted) continue;
    failed += check_run(&tests[i]);
    run++;
  }
  printf("%d tests, %d failed\n", run, failed);
  return failed || run == 0;
}
