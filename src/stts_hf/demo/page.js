// The video as it is and with its dropped blocks dimmed are one player with two pictures: whichever is on screen is at the
// moment at which the other one was left, and the line on the timeline follows it.
() => {
  const players = () => [...document.querySelectorAll("#clip video, #seen video")];
  const shown = () => players().find((video) => video.offsetParent !== null);
  let moment = 0;
  let playing = false;

  const mark = () => {
    for (const figure of document.querySelectorAll("figure.timeline")) {
      const place = 1000 * Math.min(1, moment / Number(figure.dataset.duration));
      const line = figure.querySelector(".playhead");
      line.setAttribute("x1", place);
      line.setAttribute("x2", place);
    }
  };
  const note = (event) => {
    if (event.target !== shown()) return;
    moment = event.target.currentTime;
    playing = !event.target.paused;
    mark();
  };
  for (const kind of ["timeupdate", "seeking", "play", "pause"]) document.addEventListener(kind, note, true);

  const take_over = () => {
    const video = shown();
    for (const other of players()) if (other !== video) other.pause();
    if (!video || video.readyState < 1) return;
    if (Math.abs(video.currentTime - moment) > 0.04) video.currentTime = moment;
    if (playing) video.play().catch(() => {});
  };
  document.addEventListener("loadedmetadata", (event) => {
    if (event.target.closest?.("#clip")) { moment = 0; playing = false; }
    if (event.target.closest?.("#seen")) {
      playing ||= moment === 0;  // nothing is dropped from the first frame: standing still there would show nothing
      event.target.muted = true;
      take_over();
    }
    mark();
  }, true);
  document.addEventListener("click", (event) => {
    if (event.target.closest?.("[role=tab]")) { setTimeout(take_over, 60); return; }
    const svg = event.target.closest?.("figure.timeline svg");
    const video = svg && shown();
    if (!video) return;
    const box = svg.getBoundingClientRect();
    video.currentTime = Number(svg.closest("figure").dataset.duration) * (event.clientX - box.left) / box.width;
  });
}
