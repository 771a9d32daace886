#include "monograph/safetensors/tests/hostile_files.h"

namespace monograph::safetensors {
namespace {

constexpr const char* kIndex = "model.safetensors.index.json";

// A good file with these tensors of one byte each.
std::string shard(const std::vector<std::string>& tensors) {
  std::string json = "{";
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    json += (i == 0 ? "\"" : ",\"") + tensors[i] +
            R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" + std::to_string(i) + "," +
            std::to_string(i + 1) + "]}";
  }
  return file_bytes(json + "}", tensors.size());
}

class IndexCases {
 public:
  void add(const std::string& name, const std::string& rule, std::vector<HostileFile> files) {
    cases_.push_back({name, rule, kIndex, [files = std::move(files)] { return files; }});
  }
  // The index is in this folder of the case.
  void add_in(const std::string& folder, const std::string& name, const std::string& rule,
              std::vector<HostileFile> files) {
    add(name, rule, std::move(files));
    cases_.back().open = folder + "/" + kIndex;
  }
  // Good shards a.safetensors {x} and b.safetensors {y} under this index.
  void json(const std::string& name, const std::string& rule, const std::string& json) {
    add(name, rule,
        {{kIndex, json}, {"a.safetensors", shard({"x"})}, {"b.safetensors", shard({"y"})}});
  }
  // An index that sends tensor x to this file.
  void path(const std::string& name, const std::string& rule, const std::string& file) {
    json(name, rule, R"({"weight_map":{"x":")" + file + R"("}})");
  }
  std::vector<HostileCase> take() { return std::move(cases_); }

 private:
  std::vector<HostileCase> cases_;
};

void add_json(IndexCases& cases) {
  cases.json("index_empty", "found the end", "");
  cases.json("index_is_an_array", "wanted '{'", "[]");
  cases.json("index_without_map", "weight_map is missing", R"({"metadata":{"total_size":1}})");
  cases.json("index_map_empty", "names no tensor", R"({"weight_map":{}})");
  cases.json("index_map_is_an_array", "weight_map must be an object", R"({"weight_map":["x"]})");
  cases.json("index_file_is_a_number", "the file name must be a string",
             R"({"weight_map":{"x":1}})");
  cases.json("index_two_maps", "duplicate key 'weight_map'",
             R"({"weight_map":{"x":"a.safetensors"},"weight_map":{"y":"b.safetensors"}})");
  cases.json("index_two_metadata", "duplicate key 'metadata'",
             R"({"metadata":{},"metadata":{},"weight_map":{"x":"a.safetensors"}})");
  cases.json("index_tensor_twice", "tensor 'x' occurs twice",
             R"({"weight_map":{"x":"a.safetensors","y":"b.safetensors","x":"b.safetensors"}})");
  cases.json("index_tensor_twice_by_escape", "tensor 'x' occurs twice",
             R"({"weight_map":{"x":"a.safetensors","\u0078":"a.safetensors"}})");
  cases.json("index_deep_metadata", "nested too deeply",
             R"({"metadata":{"a":)" + std::string(100000, '[') + "}}");
  cases.json("index_deep_other_key", "nested too deeply", R"({"a":)" + std::string(100000, '['));
  cases.json("index_trailing_text", "wanted the end", R"({"weight_map":{"x":"a.safetensors"}} x)");
  cases.json("index_bad_utf8", "not UTF-8", "{\"weight_map\":{\"\xff\":\"a.safetensors\"}}");
}

void add_paths(IndexCases& cases) {
  cases.path("path_parent", "'..' leaves the folder", "../a.safetensors");
  cases.path("path_parent_inside", "'..' leaves the folder", "sub/../../a.safetensors");
  cases.path("path_parent_by_escape", "'..' leaves the folder", "\\u002e./a.safetensors");
  cases.path("path_absolute", "an absolute path", "/etc/passwd.safetensors");
  cases.path("path_backslash", "a backslash", "..\\\\a.safetensors");
  cases.path("path_drive", "a colon", "C:a.safetensors");
  cases.path("path_drive_absolute", "a colon", "C:/a.safetensors");
  cases.path("path_network_share", "a backslash", "\\\\\\\\host\\\\a.safetensors");
  cases.path("path_dot", "an empty or '.' part", "./a.safetensors");
  cases.path("path_double_slash", "an empty or '.' part", "sub//a.safetensors");
  cases.path("path_empty", "an empty or '.' part", "");
  cases.path("path_trailing_slash", "an empty or '.' part", "a.safetensors/");
  cases.path("path_nul", "control character", "a\\u0000.safetensors");
  cases.path("path_line_feed", "control character", "a\\n.safetensors");
  cases.path("path_pickle", "the extension must be .safetensors", "pytorch_model.bin");
  cases.path("path_upper_case_extension", "the extension must be", "a.SAFETENSORS");
  cases.path("path_only_extension", "no name before its extension", ".safetensors");
  cases.path("path_missing_file", "cannot be found", "missing.safetensors");
}

void add_shards(IndexCases& cases) {
  const std::string one = R"({"weight_map":{"x":"a.safetensors"}})";
  const std::string two = R"({"weight_map":{"x":"a.safetensors","y":"b.safetensors"}})";
  cases.add("shard_of_zero_bytes", "a header needs at least 8",
            {{kIndex, two}, {"a.safetensors", shard({"x"})}, {"b.safetensors", ""}});
  cases.add("shard_is_a_folder", "is not a regular file",
            {{kIndex, one}, {"a.safetensors/inner", "x"}});
  cases.add("shard_without_its_tensor", "tensor 'x' is not in shard 'a.safetensors'",
            {{kIndex, one}, {"a.safetensors", shard({})}});
  cases.add("shard_with_another_tensor", "tensor 'z' of shard 'a.safetensors' is not in the index",
            {{kIndex, one}, {"a.safetensors", shard({"x", "z"})}});
  cases.add("tensor_in_the_other_shard", "the index says 'b.safetensors'",
            {{kIndex, two}, {"a.safetensors", shard({"x", "y"})}, {"b.safetensors", shard({})}});
  cases.add("tensor_in_both_shards", "the index says 'a.safetensors'",
            {{kIndex, two}, {"a.safetensors", shard({"x"})}, {"b.safetensors", shard({"x", "y"})}});
  cases.add("same_file_under_two_names", "the index says 'b.safetensors'",
            {{kIndex, two},
             {"a.safetensors", shard({"x", "y"})},
             {"b.safetensors", "a.safetensors", /*is_link=*/true}});
  cases.add("link_out_of_the_folder", "a symbolic link leaves the folder",
            {{kIndex, one}, {"a.safetensors", "/etc/hostname", /*is_link=*/true}});
  // The sibling's name begins with the folder's own: a comparison of text would let it pass.
  cases.add_in("model", "folder_link_to_a_sibling", "a symbolic link leaves the folder",
               {{"model/" + std::string(kIndex), R"({"weight_map":{"x":"sub/a.safetensors"}})"},
                {"model-evil/a.safetensors", shard({"x"})},
                {"model/sub", "../model-evil", /*is_link=*/true}});
  cases.add_in("snapshots/1", "link_past_the_cache_blobs", "a symbolic link leaves the folder",
               {{"snapshots/1/" + std::string(kIndex), one},
                {"refs/a.safetensors", shard({"x"})},
                {"snapshots/1/a.safetensors", "../../refs/a.safetensors", /*is_link=*/true}});
  cases.add("link_to_itself", "cannot be found",
            {{kIndex, one}, {"a.safetensors", "a.safetensors", /*is_link=*/true}});
}

}  // namespace

std::vector<HostileCase> hostile_indexes() {
  IndexCases cases;
  add_json(cases);
  add_paths(cases);
  add_shards(cases);
  return cases.take();
}

}  // namespace monograph::safetensors
