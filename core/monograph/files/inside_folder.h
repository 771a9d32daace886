// Symbolic links in a folder from outside: they may lead around inside it, not out of it.
#pragma once

#include <filesystem>
#include <string>

namespace monograph::files {

// The canonical path of `name` in `folder`, which is canonical itself. Throws Error, beginning with
// `what`, if it does not exist or leaves the folder. One way out is allowed: into ../../blobs of a
// Hugging Face cache (REPO/snapshots/REVISION), which consists of such links. Who may change the
// folder while it is read could replace a link after this check; it guards against folders that
// were made hostile, then handed over.
std::filesystem::path resolve_inside(const std::filesystem::path& folder, const std::string& name,
                                     const std::string& what);

}  // namespace monograph::files
