/* tests/native/test_recorder.cc: the flight recorder. */
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "base/recorder.h"

using jaxrdma::Record;
using jaxrdma::Recorder;
using jaxrdma::Stage;

TEST_CASE("an empty recorder has no records") {
  const Recorder recorder(16);
  CHECK(recorder.snapshot().empty());
}

TEST_CASE("records come back whole and in order") {
  Recorder recorder(8);
  recorder.add(Stage::kQueued, 1, 10, 100, 2);
  recorder.add(Stage::kPosted, 3, -1, 7, 4);
  const auto records = recorder.snapshot();
  REQUIRE(records.size() == 2);
  CHECK(records[0].stage == Stage::kQueued);
  CHECK(records[0].flow == 1);
  CHECK(records[0].step == 10);
  CHECK(records[0].partition == 100);
  CHECK(records[0].peer == 2);
  CHECK(records[1].stage == Stage::kPosted);
  CHECK(records[1].step == -1);
  CHECK(records[0].time_ns > 0);
  CHECK(records[1].time_ns >= records[0].time_ns);
}

TEST_CASE("a full recorder keeps the newest") {
  Recorder recorder(5);  // becomes 8
  for (int64_t step = 0; step < 100; ++step) recorder.add(Stage::kLanded, 0, step, 0, 0);
  const auto records = recorder.snapshot();
  CHECK(recorder.counts().added == 100);
  CHECK(recorder.counts().lost == 0);
  REQUIRE(records.size() == 8);
  for (size_t i = 0; i < records.size(); ++i)
    CHECK(records[i].step == static_cast<int64_t>(92 + i));
}

TEST_CASE("a recorder of capacity 0 still records") {
  Recorder recorder(0);
  recorder.add(Stage::kReduced, 0, 5, 0, 0);
  CHECK(recorder.snapshot().size() == 1);
}

TEST_CASE("snapshots taken while several threads add hold no mixed record") {
  Recorder recorder(32);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (uint16_t peer = 0; peer < 3; ++peer) {
    writers.emplace_back([&recorder, peer] {
      for (int64_t i = 0; i < 20'000; ++i) {
        const int64_t step = i * 3 + peer;
        recorder.add(Stage::kConsumed, static_cast<uint16_t>(step), step,
                     static_cast<uint32_t>(step), peer);
      }
    });
  }
  size_t seen = 0, mixed = 0;
  std::thread reader([&] {
    do {
      for (const Record& record : recorder.snapshot()) {
        ++seen;
        if (record.partition != static_cast<uint32_t>(record.step) ||
            record.flow != static_cast<uint16_t>(record.step) || record.peer != record.step % 3) {
          ++mixed;
        }
      }
    } while (!stop);
  });
  for (auto& writer : writers) writer.join();
  stop = true;
  reader.join();
  CHECK(mixed == 0);
  CHECK(seen > 0);
  CHECK(!recorder.snapshot().empty());
}

TEST_CASE("every stage has a name") {
  for (uint8_t stage = 0; stage <= static_cast<uint8_t>(Stage::kAnswered); ++stage) {
    CHECK(std::strcmp(jaxrdma::stage_name(static_cast<Stage>(stage)), "unknown") != 0);
  }
}
