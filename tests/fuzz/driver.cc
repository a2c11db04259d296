/* tests/fuzz/driver.cc: what stands in for libFuzzer where the compiler has none: it runs the
   inputs of a folder, then a fixed number of mutations of them, the same on every run.

   Usage: fuzz_TARGET FOLDER [RUNS [SEED]]. An input that ends the process is written to the file
   crash-TARGET in the present folder. It looks at no coverage: what it finds are mistakes near to
   what is known. `make fuzz` searches. */
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);

namespace {

using Bytes = std::vector<uint8_t>;

std::string crash_file;
Bytes current;

void keep_input() {
  std::ofstream(crash_file, std::ios::binary)
      .write(reinterpret_cast<const char*>(current.data()),
             static_cast<std::streamsize>(current.size()));
  std::fprintf(stderr, "the input is in %s\n", crash_file.c_str());
}

void run(Bytes input) {
  current = std::move(input);
  LLVMFuzzerTestOneInput(current.data(), current.size());
}

Bytes mutate(const std::vector<Bytes>& corpus, std::mt19937& random) {
  const auto below = [&](size_t n) { return n == 0 ? 0 : random() % n; };
  Bytes made = corpus[below(corpus.size())];
  for (size_t i = 1 + below(4); i > 0; --i) {
    const size_t at = below(made.size() + 1);
    const auto here = made.begin() + static_cast<ptrdiff_t>(at);
    switch (below(6)) {
      case 0:
        if (at < made.size()) made[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:
        if (at < made.size()) made[at] = static_cast<uint8_t>(random());
        break;
      case 2:
        made.insert(here, static_cast<uint8_t>(random()));
        break;
      case 3:
        made.erase(here, here + static_cast<ptrdiff_t>(below(made.size() - at)));
        break;
      case 4: {
        static constexpr uint8_t kEdges[] = {0x00, 0x01, 0x7f, 0x80, 0xfe, 0xff};
        const uint8_t edge = kEdges[below(std::size(kEdges))];
        std::fill(here, here + static_cast<ptrdiff_t>(below(made.size() - at)), edge);
        break;
      }
      default: {  // the rest is another's
        const Bytes& other = corpus[below(corpus.size())];
        made.erase(here, made.end());
        const size_t from = below(other.size());
        made.insert(made.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
      }
    }
  }
  return made;
}

}  // namespace

int main(int count, char** words) {
  if (count < 2) {
    std::fprintf(stderr, "usage: %s FOLDER [RUNS [SEED]]\n", words[0]);
    return 2;
  }
  crash_file = "crash-" + std::filesystem::path(words[0]).filename().string();
  __sanitizer_set_death_callback(keep_input);
  std::signal(SIGABRT, [](int) {
    keep_input();
    std::signal(SIGABRT, SIG_DFL);
    std::abort();
  });
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(words[1])) files.push_back(entry);
  std::sort(files.begin(), files.end());  // the same mutations on every file system
  std::vector<Bytes> corpus;
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "no inputs in %s\n", words[1]);
    return 2;
  }
  for (const Bytes& input : corpus) run(input);
  const int runs = count > 2 ? std::atoi(words[2]) : 0;
  std::mt19937 random(count > 3 ? static_cast<uint32_t>(std::atoi(words[3])) : 1);
  for (int i = 0; i < runs; ++i) run(mutate(corpus, random));
  std::printf("%zu inputs and %d mutations of them\n", corpus.size(), runs);
  return 0;
}
