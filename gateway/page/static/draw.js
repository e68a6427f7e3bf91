// What is drawn on canvases, and how numbers are written.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function number(value) {
  if (value === 0) return "0";
  if (value >= 100_000) return `${(value / 1000).toFixed(0)}k`;
  if (value >= 10_000) return `${(value / 1000).toFixed(1)}k`;
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return value >= 10 ? value.toFixed(0) : value.toFixed(1);
}

export function seconds(value) {
  if (!(value > 0)) return "0 ms";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.1) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  return value < 3600 ? `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s` : `${(value / 3600).toFixed(1)} h`;
}

function sized(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

// series: arrays of values, null where there is none, the newest at the right end of `places` places.
export function lines(canvas, series, { places, write, top: fixed }) {
  const { pen, width, height } = sized(canvas);
  if (!width) return;
  const highest = Math.max(...series.flat().filter((value) => value !== null), 0);
  const top = fixed ?? (highest > 0 ? ceiling(highest) : 1);
  const foot = height - 4, room = foot - 16;
  pen.strokeStyle = colour("--line");
  pen.fillStyle = colour("--dim");
  pen.font = "11px system-ui, sans-serif";
  pen.lineWidth = 1;
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(foot - room * share) + 0.5;
    pen.beginPath();
    pen.moveTo(0, y);
    pen.lineTo(width, y);
    pen.stroke();
  }
  if (highest > 0) pen.fillText(write(top), 2, 11);
  series.forEach((values, index) => {
    const points = values.map((value, at) => [width - ((values.length - 1 - at) * width) / (places - 1), value]);
    pen.strokeStyle = colour(`--series-${index + 1}`);
    pen.lineWidth = 1.8;
    pen.lineJoin = "round";
    let run = [];
    const finish = () => {
      if (!run.length) return;
      pen.beginPath();
      run.forEach(([x, y], at) => (at ? pen.lineTo(x, y) : pen.moveTo(x, y)));
      if (run.length === 1) pen.lineTo(run[0][0] + 0.1, run[0][1]);
      pen.stroke();
      if (index === 0) {
        pen.lineTo(run.at(-1)[0], foot);
        pen.lineTo(run[0][0], foot);
        pen.fillStyle = colour("--fill");
        pen.fill();
      }
      run = [];
    };
    for (const [x, value] of points) {
      if (value === null) finish();
      else run.push([x, foot - (value / top) * room]);
    }
    finish();
  });
}

const KINDS = {
  device: ["--free", "--free", "--cached", "--active", "--shared"],
  host: ["--host-free", "--host-free", "--host-cached", "--host-swapped", "--host-copying"],
};

// states, lengths: runs of equal cells, in order of the blocks. tier: whose states they are.
export function blocks(canvas, { states = [], lengths = [] }, tier) {
  const { pen, width, height } = sized(canvas);
  const total = lengths.reduce((sum, length) => sum + length, 0);
  if (!total || !width) return;
  let side = Math.max(1.5, Math.sqrt((width * height) / total));
  while (Math.floor(width / side) * Math.floor(height / side) < total) side *= 0.985;
  const columns = Math.floor(width / side), gap = side > 4 ? 1 : 0;
  side = width / columns;
  const tall = Math.min(side, height / Math.ceil(total / columns));
  const colours = KINDS[tier].map(colour);
  let cell = 0;
  states.forEach((state, run) => {
    pen.fillStyle = colours[state] ?? colours[0];
    for (const end = cell + lengths[run]; cell < end; cell += 1) {
      pen.fillRect((cell % columns) * side, Math.floor(cell / columns) * tall, side - gap, tall - gap);
    }
  });
}
