// Weights that lie in a mapped file: what is multiplied with next is asked for, what was is handed
// back, so that of such a model little more than one matrix is in memory at a time.
//
// The mapping is shared: pages that are handed back stay in the file, and in the system's cache of it
// for as long as nobody needs that memory. Threads do this for their own chunks, on the way.
#pragma once

#include "abi.hpp"

// Before items `share` of `total` of a product: asks for as large a share of what comes next and hands
// back as much of what is done. Returns at once, whatever there is to read.
void pass_on(const LinearArgs& args, const ItemRange& share, int64_t total);
// The pages of a part leave the process. Null: nothing.
void hand_back(const FilePart* part);
// The same for strips begin..end of the weight's codes, where those lie in the part; without the
// pages that other strips have a share of.
void hand_back_strips(const FilePart* part, const Weight& w, int64_t begin, int64_t end);
