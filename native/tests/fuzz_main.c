/* Runs a fuzz target on files, once each, where there is no libFuzzer. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int main(int argc, char **argv) {
  static uint8_t bytes[1 << 20];
  for (int i = 1; i < argc; i++) {
    FILE *file = fopen(argv[i], "rb");
    if (!file) {
      perror(argv[i]);
      return 1;
    }
    size_t size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    /* A copy of its own, so that reading beyond its end is seen. */
    uint8_t *copy = malloc(size ? size : 1);
    for (size_t n = 0; n < size; n++) copy[n] = bytes[n];
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
  }
  printf("%d inputs\n", argc - 1);
  return 0;
}
