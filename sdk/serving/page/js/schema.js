// Checks a value against a JSON schema, also while the value is still being written.
//
// The server guarantees that the answer follows the schema; this shows it. Keywords that are not
// known here are reported, not taken as fulfilled.

const MOST_ERRORS = 5;
const DEEPEST = 64;

const ANNOTATIONS = ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"];
const NO_CHECK = new Set([...ANNOTATIONS, "$schema", "$id", "$comment", "$defs", "definitions", "$anchor"]);

/**
 * `{errors, unchecked}`: sentences, and the names of unknown keywords. `open`: JSON pointers of the
 * parts that are not finished; what they still lack is no error.
 */
export function validate(value, schema, open = new Set()) {
  const check = new Check(schema, open);
  check.visit(value, schema, "", 0);
  return { errors: [...new Set(check.errors)].slice(0, MOST_ERRORS), unchecked: [...check.unchecked].sort() };
}

class Check {
  constructor(root, open) {
    this.root = root;
    this.open = open;
    this.errors = [];
    this.unchecked = new Set();
  }

  fail(path, text) {
    this.errors.push(`${path || "the answer"}: ${text}`);
  }

  visit(value, schema, path, depth) {
    if (schema === true || depth > DEEPEST) return;
    if (schema === false) return void this.fail(path, "nothing is allowed here");
    for (const [keyword, rule] of Object.entries(schema)) {
      if (NO_CHECK.has(keyword)) continue;
      const test = Object.hasOwn(KEYWORDS, keyword) ? KEYWORDS[keyword] : null;
      if (!test) {
        if (!HELPERS.has(keyword)) this.unchecked.add(keyword);
        continue;
      }
      try {
        test(this, value, rule, path, schema, depth);
      } catch {
        this.unchecked.add(keyword); // its value is not what the keyword needs: the server says so
      }
    }
  }

  /** Whether a value fits, without an error. */
  fits(value, schema, path, depth) {
    const inner = new Check(this.root, this.open);
    inner.visit(value, schema, path, depth + 1);
    for (const name of inner.unchecked) this.unchecked.add(name);
    return inner.errors.length === 0;
  }

  isOpen(path) {
    return this.open.has(path);
  }
}

const HELPERS = new Set(["then", "else"]);

function typeOf(value) {
  if (value === null) return "null";
  if (Array.isArray(value)) return "array";
  return typeof value;
}

function isType(value, type) {
  if (type === "integer") return Number.isInteger(value);
  return typeOf(value) === type;
}

// Keys in order, so that equal objects have equal texts.
function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const keys = Object.keys(value).sort();
  return `{${keys.map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`).join(",")}}`;
}

const under = (path, part) => `${path}/${String(part).replaceAll("~", "~0").replaceAll("/", "~1")}`;
const isObject = (value) => typeOf(value) === "object";
const list = (values) => values.map((one) => JSON.stringify(one)).join(", ");

function bound(holds, text, applies) {
  return (check, value, limit, path) => {
    if (applies(value) && !check.isOpen(path) && !holds(value, limit)) check.fail(path, `expected ${text} ${limit}`);
  };
}

const isNumber = (value) => typeof value === "number";
const isText = (value) => typeof value === "string";
const characters = (text) => Array.from(text).length;

function resolve(root, reference) {
  if (!reference.startsWith("#")) return undefined;
  let found = root;
  for (const part of reference.slice(1).split("/").slice(1)) {
    found = found?.[decodeURIComponent(part).replaceAll("~1", "/").replaceAll("~0", "~")];
  }
  return found;
}

const KEYWORDS = {
  type(check, value, type, path) {
    const types = [].concat(type);
    if (!types.some((one) => isType(value, one))) check.fail(path, `expected ${types.join(" or ")}, found ${typeOf(value)}`);
  },
  enum(check, value, allowed, path) {
    if (check.isOpen(path)) return;
    const texts = allowed.map(canonical);
    if (!texts.includes(canonical(value))) check.fail(path, `expected one of ${list(allowed)}`);
  },
  const(check, value, wanted, path) {
    if (!check.isOpen(path) && canonical(value) !== canonical(wanted)) check.fail(path, `expected ${JSON.stringify(wanted)}`);
  },
  required(check, value, names, path) {
    if (!isObject(value) || check.isOpen(path)) return;
    const missing = names.filter((name) => !Object.hasOwn(value, name));
    if (missing.length) check.fail(path, `missing ${list(missing)}`);
  },
  properties(check, value, schemas, path, schema, depth) {
    if (!isObject(value)) return;
    for (const [name, one] of Object.entries(schemas)) {
      if (Object.hasOwn(value, name)) check.visit(value[name], one, under(path, name), depth + 1);
    }
  },
  patternProperties(check, value, schemas, path, schema, depth) {
    if (!isObject(value)) return;
    for (const [pattern, one] of Object.entries(schemas)) {
      const expression = new RegExp(pattern, "u");
      for (const name of Object.keys(value)) {
        if (expression.test(name)) check.visit(value[name], one, under(path, name), depth + 1);
      }
    }
  },
  additionalProperties(check, value, one, path, schema, depth) {
    if (!isObject(value)) return;
    const patterns = Object.keys(schema.patternProperties ?? {}).map((text) => new RegExp(text, "u"));
    for (const name of Object.keys(value)) {
      if (Object.hasOwn(schema.properties ?? {}, name) || patterns.some((pattern) => pattern.test(name))) continue;
      if (one === false) check.fail(path, `unexpected ${JSON.stringify(name)}`);
      else check.visit(value[name], one, under(path, name), depth + 1);
    }
  },
  prefixItems(check, value, schemas, path, schema, depth) {
    if (!Array.isArray(value)) return;
    schemas.slice(0, value.length).forEach((one, i) => check.visit(value[i], one, under(path, i), depth + 1));
  },
  items(check, value, one, path, schema, depth) {
    if (!Array.isArray(value)) return;
    const first = schema.prefixItems?.length ?? 0;
    value.slice(first).forEach((item, i) => check.visit(item, one, under(path, first + i), depth + 1));
  },
  uniqueItems(check, value, unique, path) {
    if (!unique || !Array.isArray(value) || check.isOpen(path)) return;
    if (new Set(value.map(canonical)).size < value.length) check.fail(path, "expected different items");
  },
  minimum: bound((value, limit) => value >= limit, "at least", isNumber),
  maximum: bound((value, limit) => value <= limit, "at most", isNumber),
  exclusiveMinimum: bound((value, limit) => value > limit, "more than", isNumber),
  exclusiveMaximum: bound((value, limit) => value < limit, "less than", isNumber),
  minLength: bound((value, limit) => characters(value) >= limit, "a length of at least", isText),
  maxLength: bound((value, limit) => characters(value) <= limit, "a length of at most", isText),
  minItems: bound((value, limit) => value.length >= limit, "a number of items of at least", Array.isArray),
  maxItems: bound((value, limit) => value.length <= limit, "a number of items of at most", Array.isArray),
  minProperties: bound((value, limit) => Object.keys(value).length >= limit, "a number of names of at least", isObject),
  maxProperties: bound((value, limit) => Object.keys(value).length <= limit, "a number of names of at most", isObject),
  multipleOf(check, value, step, path) {
    if (!isNumber(value) || check.isOpen(path)) return;
    const count = value / step;
    if (Math.abs(count - Math.round(count)) > 1e-9 * Math.max(1, Math.abs(count))) {
      check.fail(path, `expected a multiple of ${step}`);
    }
  },
  pattern(check, value, pattern, path) {
    if (!isText(value) || check.isOpen(path)) return;
    if (!new RegExp(pattern, "u").test(value)) check.fail(path, `expected a text that matches ${pattern}`);
  },
  allOf(check, value, schemas, path, schema, depth) {
    for (const one of schemas) check.visit(value, one, path, depth + 1);
  },
  anyOf(check, value, schemas, path, schema, depth) {
    if (!schemas.some((one) => check.fits(value, one, path, depth))) check.fail(path, "fits none of anyOf");
  },
  oneOf(check, value, schemas, path, schema, depth) {
    const count = schemas.filter((one) => check.fits(value, one, path, depth)).length;
    // An unfinished value may still fit several.
    if (count === 0) check.fail(path, "fits none of oneOf");
    else if (count > 1 && check.open.size === 0) check.fail(path, "fits several of oneOf");
  },
  not(check, value, one, path, schema, depth) {
    if (check.open.size === 0 && check.fits(value, one, path, depth)) check.fail(path, "fits what is excluded");
  },
  if(check, value, one, path, schema, depth) {
    if (check.open.size) return;
    const branch = check.fits(value, one, path, depth) ? schema.then : schema.else;
    if (branch !== undefined) check.visit(value, branch, path, depth + 1);
  },
  $ref(check, value, reference, path, schema, depth) {
    const target = resolve(check.root, reference);
    if (target === undefined) check.unchecked.add("$ref");
    else check.visit(value, target, path, depth + 1);
  },
};
