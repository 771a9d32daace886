#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <new>
#include <stdexcept>
#include <string>

#include "command.h"
#include "failure.h"
#include "monograph/base/error.h"
#include "monograph/files/file_ops.h"

namespace monograph::cli {
namespace {

template <class Thrown>
int code_of(const Thrown& thrown, const std::string& said) {
  testing::internal::CaptureStderr();
  int code = 0;
  try {
    throw thrown;
  } catch (...) {
    code = report_failure();
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "monograph: " + said + "\n");
  return code;
}

TEST(Failure, EveryKindHasItsCode) {
  EXPECT_EQ(code_of(Error("a file"), "a file"), 3);
  EXPECT_EQ(code_of(std::bad_alloc(), "out of memory"), 6);
  const files::IoError full("disk", "cannot write", ENOSPC);
  EXPECT_EQ(code_of(full, full.what()), 5);
  const std::filesystem::filesystem_error gone("gone", std::error_code());
  EXPECT_EQ(code_of(gone, gone.what()), 5);
}

// Not 1, which is what `diff` and `adapter check` say of a finding.
TEST(Failure, WhatNobodyExpectedIsNoFinding) {
  EXPECT_EQ(code_of(std::logic_error("ours"), "ours"), 70);
  EXPECT_EQ(code_of(std::out_of_range("vector::at"), "vector::at"), 70);
  EXPECT_EQ(code_of(7, "something that is no exception was thrown"), 70);
}

}  // namespace
}  // namespace monograph::cli
