// Notices that the server has gone, and asks until it is back.

const FIRST_WAIT = 1;
const LONGEST_WAIT = 15;

export class Connection {
  /** `onChange(state)`: `{up, seconds}`, with the seconds until the next try while it is down. */
  constructor(answers, onChange) {
    this.answers = answers;
    this.onChange = onChange;
    this.up = true;
    this.wake = () => {};
  }

  /** Somebody got no answer, or a bad one. Resolves when the server answers. */
  async lost() {
    if (!this.up) return;
    this.up = false;
    if (await this.answers()) {
      this.up = true; // it was something else
      return;
    }
    for (let wait = FIRST_WAIT; ; wait = Math.min(2 * wait, LONGEST_WAIT)) {
      for (let seconds = wait; seconds > 0; seconds -= 1) {
        this.onChange({ up: false, seconds });
        if (await this.sleep(1000)) break;
      }
      this.onChange({ up: false, seconds: 0 });
      if (await this.answers()) break;
    }
    this.up = true;
    this.onChange({ up: true, seconds: 0 });
  }

  /** Tries at once. */
  tryNow() {
    this.wake(true);
  }

  sleep(milliseconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(() => resolve(false), milliseconds);
      this.wake = () => {
        clearTimeout(timer);
        resolve(true);
      };
    });
  }
}
