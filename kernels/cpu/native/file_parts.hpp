// Weights in a mapped file: the next part is read ahead and the previous one is released, so that
// little more than one matrix of such a model is in memory at a time.
//
// The mapping is shared: released pages stay in the file, and in the system's cache of it as long as
// nothing else needs that memory. Threads do this for their own tasks, between multiplications.
#pragma once

#include "abi.hpp"

// Before items `share` of `total` of a product: requests the same share of the next part and releases
// the same share of the previous part. Returns at once, however much there is to read.
void stream_file_parts(const LinearArgs& args, const ItemRange& share, int64_t total);
// Releases the pages of a part. Null: nothing.
void release_part(const FilePart* part);
// The same for strips begin..end of the weight's codes, if these are in the part; pages that other
// strips share are kept.
void release_strips(const FilePart* part, const Weight& w, int64_t begin, int64_t end);
