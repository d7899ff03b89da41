// Row-wise operators that copy or add rows as they are.
#pragma once

#include <stdint.h>

#include "abi.hpp"

// Rows that others choose, e.g. the last one of each request.
void select_rows(const SelectArgs& args, int64_t begin, int64_t end);
// Rows from elsewhere take the place of some, or are added to them.
void place_rows(const PlaceRowsArgs& args, int64_t begin, int64_t end);
// The columns of each row in another order.
void take_columns(const TakeArgs& args, int64_t begin, int64_t end);
// Exchange with other ranks: puts own rows into this rank's area, then adds or joins the rows of all.
void send_rows(const ExchangeArgs& args, int64_t begin, int64_t end);
void receive_rows(const ExchangeArgs& args, int64_t begin, int64_t end);
