// The 22 element types a safetensors file can hold: name in the header and width in bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace monograph::safetensors {

// The order is that of the reference implementation, by increasing alignment: the writer sorts
// tensors by it, descending, so that our files are byte for byte those of the Rust writer.
enum class StoredDType : std::uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

struct StoredDTypeInfo {
  std::string_view name;
  std::uint32_t bits;
};

// Indexed by StoredDType.
inline constexpr std::array<StoredDTypeInfo, 22> kStoredDTypes = {{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};
static_assert(kStoredDTypes[static_cast<std::size_t>(StoredDType::kU64)].name == "U64");
static_assert(kStoredDTypes[static_cast<std::size_t>(StoredDType::kBF16)].name == "BF16");

constexpr const StoredDTypeInfo& info_of(StoredDType dtype) {
  return kStoredDTypes[static_cast<std::size_t>(dtype)];
}
constexpr std::string_view name_of(StoredDType dtype) { return info_of(dtype).name; }
constexpr std::uint32_t bits_of(StoredDType dtype) { return info_of(dtype).bits; }

// The type with exactly this name (upper case, as in a header).
constexpr std::optional<StoredDType> find_stored_dtype(std::string_view name) {
  for (std::size_t i = 0; i < kStoredDTypes.size(); ++i) {
    if (kStoredDTypes[i].name == name) return static_cast<StoredDType>(i);
  }
  return std::nullopt;
}

}  // namespace monograph::safetensors
